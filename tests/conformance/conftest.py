"""What other tests have made: models, batches, records, engines, gateways, and runs that are killed."""

from tests.algorithms.conftest import make_record
from tests.engine.conftest import ask, fixed_shapes, make_model, other, serve, share, tiny
from tests.gateway.conftest import backend, open_world, renderer
from tests.resume.lives import zygote
from tests.trainer.conftest import as_input, make_batch, model_folder, one_thread, teacher_folder

__all__ = [
    "as_input",
    "ask",
    "backend",
    "fixed_shapes",
    "make_batch",
    "make_model",
    "make_record",
    "model_folder",
    "one_thread",
    "open_world",
    "other",
    "renderer",
    "serve",
    "share",
    "teacher_folder",
    "tiny",
    "zygote",
]
