"""Small real training runs with the trainers of their time: ``python -m tests.trainers.run``."""
