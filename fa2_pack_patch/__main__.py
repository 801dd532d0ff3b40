"""``python -m fa2_pack_patch``."""

import sys

from .cli import main

sys.exit(main())
