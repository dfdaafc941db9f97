"""How much memory a run takes, by place: this machine's, and each GPU's. Pure arithmetic; it measures nothing.

P parameters, V vocabulary, H hidden size, I intermediate size, L layers, Q D and K D sizes of queries and of keys (the
rest of the letters: shape.py). N trainer ranks. T tokens that go through the trainer's model at once: the budget of a
micro-batch, or the longest context where that may go alone. Bytes:

    a rank of the trainer, always      12 P / N         weights and Adam's two moments, in float32
                                        4 P / N         a reference (algorithm.reference)
                                       12 (P' + H) / N  a critic, whose P' are the policy's below its output layer
      while it trains, besides          4 P / N         gradients, and 4 (P' + H) / N of a critic
                                        2 P             on a GPU: the matrices in bfloat16, kept for the backward pass
                                        4 (V H + 2 layers)  with N > 1: what is gathered at a time
                                        T (L + 1) a     activations; checkpointed: T (4 H L + 2 a)
                                       20 min(T V, 2^24)    logits of one chunk: five float32 tensors of them
                                        6 V H           the gradient of the output layer on its way (on a CPU 4 V H)
      while it updates, besides         8 P / N         gradients, and AdamW's own workspace
      while it loads                    4 P             of each model, whole, before it is spread
      while it publishes, N > 1         4 P             more on rank 0: the weights in one piece

      a, of a token and a layer, on a GPU (residuals and norms in float32, the rest in bfloat16):
              26 H + 6 Q D + 4 K D + 8 I  + 6 (Q D + K D) where queries and keys are normalised
      and on a CPU, all in float32:
              24 H + 12 Q D + 8 K D + 16 I  + 8 (Q D + K D)

      where adapters are trained (`trainer.lora`), of A parameters, beside M parameters in matrices of layers:
         always                         4 P / N         weights; of the M on a GPU 2 M where files are in bfloat16
                                       12 A / N         adapters and their moments; no reference
         while it trains, besides       4 A / N         gradients, none of the output layer, and 2 (P - M) of copies
                                        T L e R          a target: between the matrices of each adapter
         while it publishes             e M             merged weights, on rank 0

    an engine                           e P             weights, e bytes each: 4 on a CPU, 2 on a GPU
                                        2 e L K D       keys and values of one token, times the tokens kept
                                        8 V R           logits of R running requests
      with SGLang                       what `--mem-fraction-static` gives, or `kv_tokens` where that is less

    new weights on their way            2 e P           in shared memory (two slots), and e P once more in the engine;
                                          e P           with `cuda_ipc`, `distributed`: in the trainer and the engine
                                        2 e P           with `distributed`: in each process of SGLang's, vLLM's

Where an engine lends the memory of its keys (`engine.release_kv`), they and a train step are never there at once.

The constants of memory_parts.py stand for what no formula tells: Python and its libraries, CUDA, an engine's graphs.
"""

from dataclasses import dataclass

from areal_agent.config import Config
from areal_agent.doctor.engine_memory import EngineMemory
from areal_agent.doctor.machine import Machine
from areal_agent.doctor.memory_parts import KEYS, MAIN_BYTES, WORKER_BYTES, Part, part_of, sum_of, uses_gpu
from areal_agent.doctor.shape import ModelShape
from areal_agent.doctor.trainer_memory import TrainerMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What a run takes in one place at the most."""

    gpu: int | None  # its number; None: the machine's memory
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum_of(self.parts)


def estimate(shape: ModelShape, config: Config, machine: Machine) -> tuple[Need, ...]:
    """What a run of `config` takes of `machine`, and of each of its GPUs that is used."""
    trainer = TrainerMemory(shape=shape, config=config, is_gpu=uses_gpu(config.trainer.device, machine))
    engine = EngineMemory(shape=shape, config=config, machine=machine)
    host = [Part(what="main process", num_bytes=MAIN_BYTES)]
    host += part_of("rollout workers", config.rollout.workers * WORKER_BYTES)
    host += [*engine.on_machine(), *trainer.on_machine(), *trainer.on_its_way()]
    ranks = config.trainer.num_ranks if trainer.is_gpu else 0
    numbers = range(max(machine.num_gpus, ranks))
    gpus = {number: _on_gpu(engine, trainer, number, has_rank=number < ranks) for number in numbers}
    return (
        Need(gpu=None, parts=tuple(host)),
        *(Need(gpu=number, parts=parts) for number, parts in gpus.items() if parts),
    )


def _on_gpu(engine: EngineMemory, trainer: TrainerMemory, number: int, *, has_rank: bool) -> tuple[Part, ...]:
    """Engine and trainer at their most; an engine that lends its keys' memory has them at another time."""
    sampling = engine.on_gpu(number)
    if not has_rank:
        return sampling
    if not engine.config.engine.release_kv:
        return (*sampling, *trainer.at_peak(number))
    lent = tuple(part for part in sampling if part.what != KEYS)
    phases = [(*sampling, *trainer.publishing(number)), (*lent, *trainer.at_peak(number))]
    return max(phases, key=sum_of)
