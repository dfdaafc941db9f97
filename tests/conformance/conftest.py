"""The tiny model, batches and records of the trainer's and the algorithms' tests."""

from tests.algorithms.conftest import make_record
from tests.trainer.conftest import as_input, make_batch, model_folder, one_thread

__all__ = ["as_input", "make_batch", "make_record", "model_folder", "one_thread"]
