"""The model that is trained: the policy, its critic, and the layers that they change in a transformers model.

`Policy` wraps a causal language model and computes log-probabilities of loss tokens (forward.py). `Critic` copies it
with one output in place of the vocabulary. `Adapter` adds LoRA, and `recompute` trades time for memory. With several
ranks, each loads only its rows of every parameter, and the model stays on the meta device until `shard`. Methods that
gather parameters do so one after the other and are collective: every rank has to call them.
"""

import copy
import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Self, cast

import orjson
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

from areal_agent.algorithms.batching import MicroBatch
from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.losses import value_loss
from areal_agent.engine.embedded.packed import Kernel, packed_kernel
from areal_agent.engine.foreign.weight_folders import TIED_HEAD, read_file_shapes, read_shapes
from areal_agent.engine.pushes import weight_files
from areal_agent.errors import ConfigError
from areal_agent.images import has_processor
from areal_agent.models.causal import fault_of, takes_images
from areal_agent.trainer.compiled import Compiled
from areal_agent.trainer.config import LoraConfig, TrainerConfig
from areal_agent.trainer.context import Context
from areal_agent.trainer.forward import (
    LossTokenForward,
    choose_attention,
    decoder_layers,
    decoder_of,
    hidden_states,
    tree_fault,
    vocab_size,
)
from areal_agent.trainer.halves import Halves
from areal_agent.trainer.metrics import Work
from areal_agent.trainer.optimizer import Optimizer, Schedule
from areal_agent.trainer.ranks import ALONE, FLOAT32, Group, Precision, fill, set_apart, whole
from areal_agent.trainer.vision import Vision, tower_of
from areal_agent.types import TensorEntry
from areal_agent.weights.channels import layout

Computing = Callable[[], AbstractContextManager[None]]
"""Makes a context, which may be nested, in which a model's parameters are those that it computes with."""
UNUSED = "rotary_emb.inv_freq"
"""Tensors in the files of old models, which every program computes itself."""


def _require_layers(folder: Path, what: str) -> None:
    """Raise ConfigError for a config.json with more layers than its files have tensors: transformers lists them all."""
    fields: dict[str, Any] = orjson.loads((folder / "config.json").read_bytes())
    num_layers = (fields.get("text_config") or fields).get("num_hidden_layers") or 0
    num_tensors = len(read_shapes(folder))
    if num_layers > num_tensors:
        raise ConfigError(f"{what}: its config.json has {num_layers:,} layers, and its files {num_tensors:,} tensors")


def _require_in_proportion(loader: Any, config: PreTrainedConfig, folder: Path, what: str) -> None:
    """Raise ConfigError for a model of twice the size of its files, before memory is taken for it."""
    with torch.device("meta"):
        size = loader.from_config(config).num_parameters()
    if size > 2 * (found := sum(map(math.prod, read_shapes(folder).values()))):
        raise ConfigError(f"{what}: its config.json is of {size:,} parameters, and its files have {found:,}")


class Policy:
    """A causal language model with float32 weights. It computes in float32 until `shard` gives it another precision."""

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        *,
        is_padded: bool = False,
        group: Group = ALONE,
        vision: Vision | None = None,
    ) -> None:
        """Take a model for packed or padded micro-batches. Raises ConfigError if it cannot be trained in them.

        With several ranks it must have been made within `Group.sharing`. With `vision` it is one that takes images, in
        padded micro-batches, and its vision tower is frozen.
        """
        self._rows = set_apart(model, device) if group.size > 1 else {}  # which `shard` gives it back
        # eval mode: dropout would make the proximal and the current policy differ without an update
        self.model = (model if self._rows else model.to(device)).eval()  # pyright: ignore[reportArgumentType]
        self.device = device
        self.vision = vision
        if vision is not None:
            self.train_vision(False)
        self.adapter: Adapter | None = None
        self._compiled: Compiled | None = None
        self._group = group
        saved = model.state_dict().keys()
        self._buffers = {name: one for name, one in model.named_buffers() if name in saved}  # never trained
        self.computing: Computing = nullcontext
        self._untrained: dict[str, Path] = {}  # the file of each tensor that this model lacks
        self.kernel, self.tree_fault = self._choose_attention(is_padded=is_padded or vision is not None)
        self._loss_tokens = LossTokenForward(self.model, self.kernel, vision)

    @classmethod
    def load(cls, folder: Path, device: torch.device, *, is_padded: bool = False, group: Group = ALONE) -> Self:
        """Load a Hugging Face folder (safetensors only). Raises ConfigError if it cannot be trained.

        Each rank of `group` reads all files, and keeps its rows of every tensor. Collective.
        """
        what = f"cannot load a causal language model from {str(folder)!r}"
        try:
            _require_layers(folder, what)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            sees = has_processor(folder)
            if fault := fault_of(config.to_dict(), has_processor=sees):
                raise ConfigError(f"{what}: {fault}")
            vision, loader = None, AutoModelForCausalLM
            if takes_images(config.to_dict(), has_processor=sees):
                vision, loader = Vision.load(folder, config), AutoModelForImageTextToText
            _require_in_proportion(loader, config, folder, what)
            with group.sharing():
                model, loaded = cast(
                    tuple[PreTrainedModel, Mapping[str, Collection[str]]],
                    loader.from_pretrained(
                        folder,
                        dtype=torch.float32,
                        use_safetensors=True,
                        trust_remote_code=False,
                        local_files_only=True,
                        output_loading_info=True,
                        ignore_mismatched_sizes=True,  # they are refused below, by name
                    ),
                )
        except ConfigError:
            raise
        except Exception as error:  # transformers' errors about damaged files share no type
            cause = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ConfigError(f"{what}: {cause}") from error
        if loaded["missing_keys"]:  # transformers would fill them with random numbers
            raise ConfigError(f"{what}: its files lack the weights {sorted(loaded['missing_keys'])[:3]}")
        if mismatched := sorted(map(str, loaded["mismatched_keys"])):
            raise ConfigError(f"{what}: the shapes of its weights are not those of its config.json: {mismatched[:3]}")
        policy = cls(model, device, is_padded=is_padded, group=group, vision=vision)
        policy._compare_with(folder)
        return policy

    def frozen(self) -> Self:
        """Return this policy with gradients off, for use as a reference."""
        self.model.requires_grad_(False)
        return self

    def train_vision(self, is_trained: bool) -> None:
        """Train the vision tower of a model that takes images, or leave it as it is. Make copies (`backbone`) after."""
        for part in tower_of(self._decoder):
            part.requires_grad_(is_trained)

    def adapt(self, config: LoraConfig, seed: int, precision: Precision = FLOAT32) -> None:
        """Train only adapters from now on. A copy (`backbone`) that is to be trained in full has to be made before."""
        layers = decoder_layers(self._decoder)
        if precision.layers == torch.bfloat16:
            halve(self.model, layers, self._rows)
        self.adapter = Adapter.attach(self.model, layers, config, seed)

    def backbone(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return a copy of everything below the output layer, and its own parameters if they are set apart."""
        names = {one: name for name, one in self.model.named_parameters()}
        inner = {name: names[one] for name, one in self._decoder.named_parameters()}
        rows = {name: self._rows[outer].clone() for name, outer in inner.items() if outer in self._rows}
        return copy.deepcopy(self._decoder), rows

    def compile_layers(self, compiled: Compiled) -> None:
        """Have torch compile the layers. Make copies before, and `recompute_layers` after."""
        compiled.take(decoder_layers(self._decoder))
        self._compiled = compiled

    @property
    def is_untried(self) -> bool:
        """Whether layers run compiled, and `try_compiled` has not been called; never where FSDP2 has the parameters."""
        return self._compiled is not None and not self._compiled.is_tried and self._group.mesh is None

    def try_compiled(self, batch: MicroBatch) -> None:
        """Leave compiled layers where they do not give the gradient of plain ones. Call it within `computing`."""
        assert self._compiled is not None, "`is_untried` says whether there is anything to try"
        parameters = [one for one in self._loss_tokens.parameters() if one.requires_grad]
        self._compiled.try_out(lambda: self._loss_tokens(batch)[0], parameters)

    def recompute_layers(self) -> None:
        """Recompute activations in the backward pass instead of keeping them. Make copies (`backbone`) before."""
        recompute(decoder_layers(self._decoder))

    def shard(self, group: Group, precision: Precision = FLOAT32) -> None:
        """Shard the parameters over the ranks of `group`, and compute in `precision`. Make copies before."""
        if group.context is not None:
            group.context.check(int(self.model.config.get_text_config().num_attention_heads))
        self._loss_tokens.context = group.context
        group.shard(decoder_layers(self._decoder), self._loss_tokens, precision)
        fill(self.model, self._rows)
        self._rows = {}
        self._group = group
        self.computing = computing_in(self._loss_tokens, decoder_layers(self._decoder), group, precision)

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def work(self) -> Work:
        """The operations of a forward and backward pass."""
        config = self.model.config.get_text_config()
        is_full = self.adapter is None
        return Work.of(
            decoder_layers(self._decoder), config, num_outputs=vocab_size(self.model), is_head_trained=is_full
        )

    @property
    def publish_dtype(self) -> torch.dtype:
        """The dtype of what engines get: on a GPU what they compute in; on a CPU they cast their layers."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def trained_parameters(self) -> dict[str, Tensor]:
        """Return the trained parameters by name; with several ranks, this rank's shards."""
        if self.adapter is not None:
            return self.adapter.parameters()
        return {name: one for name, one in self.model.named_parameters() if one.requires_grad}

    def named_parameters(self) -> dict[str, Tensor]:
        """Return the parameters but the adapters by name, tied weights once; with several ranks, this one's shards."""
        adapters = {} if self.adapter is None else self.adapter.parameters()
        return {name: one for name, one in self.model.named_parameters() if name not in adapters}

    def published(self, dtype: torch.dtype | None = None) -> tuple[TensorEntry, ...]:
        """Return the layout of `whole_parameters`: names and shapes are those of the model's files."""
        empty = self._empty(dtype or self.publish_dtype)
        saved = (self._as_saved({name: empty[name] for name in names}).items() for names in self._joined)
        return layout(chain(*saved, self._read_untrained()))

    def whole_parameters(
        self,
        dtype: torch.dtype | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        *,
        on_all_ranks: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield what is published tensor by tensor, merged with the adapters, by default in `publish_dtype`.

        `parameters`, by default the model's own, are this rank's shards of all of them and of the adapters. Collective:
        every rank has to iterate to the end. Without `on_all_ranks`, only rank 0 is given tensors.
        """
        is_given = on_all_ranks or self._group.rank == 0
        parameters = dict(self.model.named_parameters()) if parameters is None else parameters
        for names in self._joined:
            tensors = {
                name: self._buffers[name]
                if name in self._buffers
                else self._whole(name, parameters, dtype or self.publish_dtype)
                for name in names
            }
            if is_given:
                yield from self._as_saved(tensors).items()
        if is_given:
            yield from self._read_untrained()

    @property
    def is_part(self) -> bool:
        """Whether the files hold tensors that transformers' model lacks; they are published as they are.

        These are a vision tower where only text is trained, or layers for speculative decoding.
        """
        return bool(self._untrained)

    @cached_property
    def _joined(self) -> list[list[str]]:
        """The parameters and saved buffers in their order, those together that only together are tensors of the files.

        Mostly each is alone: what is published never has to be there at once.
        """
        empty = self._empty(torch.float32)
        shapes = {name: one.shape for name, one in self._as_saved(empty).items()}
        joined: list[list[str]] = []
        waiting: list[str] = []
        for name in empty:
            waiting.append(name)
            saved = self._as_saved({one: empty[one] for one in waiting})
            if saved and all(shapes.get(key) == one.shape for key, one in saved.items()):
                joined.append(waiting)
                waiting = []
        return joined

    def _empty(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return parameters and saved buffers by name, without values; parameters have this dtype."""
        dtypes = dict.fromkeys(self.named_parameters(), dtype) | {
            name: one.dtype for name, one in self._buffers.items()
        }
        tensors = self.named_parameters() | self._buffers
        return {name: torch.empty(one.shape, dtype=dtypes[name], device="meta") for name, one in tensors.items()}

    def _as_saved(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by their names in the model's files, where transformers has joined or renamed them.

        Engines load files. The experts of a layer, for example, are two tensors here and three for each expert there.
        """
        saved = revert_weight_conversion(self.model, dict(state))
        return {name: saved[name] for name in (*state, *saved) if name in saved}  # transformers sorts them

    def _read_untrained(self) -> Iterator[tuple[str, Tensor]]:
        for name, file in self._untrained.items():
            with safe_open(file, framework="pt") as opened:
                yield name, opened.get_tensor(name)

    def whole_adapter(self) -> dict[str, Tensor]:
        """Return the adapters by name, whole. Collective; every rank gets them."""
        return {name: whole(one.detach()) for name, one in self.trained_parameters().items()}

    def logprobs_and_entropy(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of the batch's loss tokens, [M] each, at the rollouts' temperatures.

        For gradients, call it and make the backward pass within `computing`.
        """
        with nullcontext() if torch.is_grad_enabled() else self.computing():
            return self._loss_tokens(batch)

    def logprobs_without_adapter(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return `logprobs_and_entropy` of the model without its adapters: the reference, in the same memory."""
        assert self.adapter is not None, "there is nothing to leave out"
        with self.adapter.off():
            return self.logprobs_and_entropy(batch)

    def _compare_with(self, folder: Path) -> None:
        """Note what the folder's files hold besides this model. Raises ConfigError if they lack some of it."""
        paths = [folder / file for file in weight_files(folder)]
        files = {name: path for path in paths for name in read_file_shapes(path) if not name.endswith(UNUSED)}
        if TIED_HEAD not in dict(self.model.named_parameters()):  # the files may repeat the embedding
            files.pop(TIED_HEAD, None)
        ours = {entry.name for entry in self.published()}
        if lacking := sorted(ours - files.keys()):
            raise ConfigError(
                f"cannot train the model in {str(folder)!r}: transformers' {type(self.model).__name__} would save "
                f"{len(lacking)} tensors under other names, such as {lacking[0]!r}, and engines could not load them; "
                "load it with transformers' AutoModelForCausalLM, and save it again"
            )
        self._untrained = {name: path for name, path in files.items() if name not in ours}

    def _whole(self, name: str, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        if self.adapter is None:
            return whole(parameters[name].detach().to(dtype))
        return self.adapter.merged(name, parameters, dtype)

    def _choose_attention(self, *, is_padded: bool) -> tuple[Kernel | None, str | None]:
        """Give the model an attention that is proved with its weights, in float32 whatever it is to compute in.

        Returns the kernel that it may use, and why sequences that share prefixes cannot be in a tree, None if they can.
        """
        trial = self.model
        if self._rows:
            trial = copy.deepcopy(self.model)  # of which one layer at a time is gathered
            self._group.shard(decoder_layers(decoder_of(trial)), None)
            fill(trial, self._rows)
        kernel = packed_kernel() if self.device.type == "cuda" else None
        kernel = choose_attention(trial, is_padded=is_padded, kernel=kernel, vision=self.vision)
        fault = "its rows hold one sequence each" if is_padded else tree_fault(trial, kernel)
        self.model.set_attn_implementation(cast(Any, trial.config)._attn_implementation)
        return kernel, fault

    @property
    def _decoder(self) -> nn.Module:
        return decoder_of(self.model)


def computing_in(module: nn.Module, layers: Sequence[nn.Module], group: Group, precision: Precision) -> Computing:
    """Return how a module and the layers in it get the parameters of this precision: one rank by copies, not FSDP2."""
    if group.mesh is not None or precision.layers == torch.float32:
        return nullcontext
    is_whole = precision.rest == precision.layers
    return Halves([module] if is_whole else layers, casts=not is_whole).on


def choose_device(name: str, *, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """Return a rank's device for `auto`, `cpu` or `cuda`. Raises ConfigError for more ranks than CUDA devices."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("trainer.device is 'cuda', but torch sees no CUDA device; use 'auto' or 'cpu'")
    if num_ranks > torch.cuda.device_count():
        raise ConfigError(
            f"trainer.num_ranks is {num_ranks}, but torch sees {torch.cuda.device_count()} CUDA devices, and each rank "
            "needs one; lower it, or set trainer.device to 'cpu'"
        )
    return torch.device("cuda", rank)


class ValueForward(nn.Module):
    """The forward pass as one module, because FSDP2 gathers parameters per module."""

    def __init__(
        self,
        decoder: nn.Module,
        head: nn.Module,
        kernel: Kernel | None,
        context: Context | None = None,
        vision: Vision | None = None,
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = head
        self._kernel = kernel
        self._context = context
        self._vision = vision

    def forward(self, batch: MicroBatch) -> Tensor:
        own = batch if self._context is None else self._context.part(batch)
        values = self.head(hidden_states(self.decoder, own, self._kernel, self._context, self._vision)).squeeze(1)
        return values if self._context is None else self._context.gather(values, batch)


class Critic:
    """Predicts the value of each loss token: what the rollout earns from it on, given the tokens before it.

    It starts as a copy of the policy with an output layer of zeros, so every value is 0 at first.
    """

    def __init__(
        self,
        policy: Policy,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        *,
        schedule: Schedule | None = None,
        group: Group = ALONE,
        precision: Precision = FLOAT32,
        compiled: Compiled | None = None,
    ) -> None:
        self._clip = algorithm.value_clip
        decoder, rows = policy.backbone()
        head = nn.Linear(policy.hidden_size, 1, bias=False, device=policy.device)
        nn.init.zeros_(head.weight)
        self.model = ValueForward(decoder, head, policy.kernel, group.context, policy.vision).eval()
        if compiled is not None:
            compiled.take(decoder_layers(decoder))
        if config.gradient_checkpointing:
            recompute(decoder_layers(decoder))
        group.shard(decoder_layers(decoder), self.model, precision)
        fill(decoder, rows)
        self.computing = computing_in(self.model, decoder_layers(decoder), group, precision)
        rate = algorithm.critic_learning_rate or config.learning_rate
        own_schedule = None if schedule is None else replace(schedule, peak=rate)
        self.work = Work.of(decoder_layers(decoder), policy.model.config.get_text_config(), num_outputs=1)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = Optimizer(trained, config.model_copy(update={"learning_rate": rate}), own_schedule)

    def values(self, batch: MicroBatch) -> Tensor:
        """Return the value of each loss token of the micro-batch, [M] float32."""
        with nullcontext() if torch.is_grad_enabled() else self.computing():
            return self.model(batch).float()

    def backward(self, batch: MicroBatch) -> tuple[float, int]:
        """Accumulate the gradient of the clipped value loss; return the loss and how many values were clipped."""
        assert batch.values is not None and batch.returns is not None, "a critic learns returns"
        loss, num_clipped = value_loss(self.values(batch), batch.values, batch.returns, batch.weights, clip=self._clip)
        loss.backward()
        return float(loss.detach()), num_clipped


class LoraLinear(nn.Linear):
    """A linear layer with an adapter (LoRA, arXiv 2106.09685). It shares weight and bias with the original layer.

        y = x W^T + b + (alpha / R) (x A^T) B^T     W [O, I] and b [O] frozen; A [R, I] random, B [O, R] zero at first

    I inputs, O outputs, R the rank. A new adapter changes nothing, because B is zero. Merged, the layer is a plain one
    of weight W + (alpha / R) B A.
    """

    def __init__(self, layer: nn.Linear, *, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight
        self.bias = layer.bias
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False, device="meta")
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False, device="meta")
        bound = 1 / math.sqrt(layer.in_features)
        begun = torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        device = begun.device if layer.weight.is_meta else layer.weight.device  # sharding moves them
        self.lora_A.weight = nn.Parameter(begun.to(device))
        self.lora_B.weight = nn.Parameter(torch.zeros(layer.out_features, rank, device=device))
        self.scale = scale
        self.is_on = True

    def forward(self, input: Tensor) -> Tensor:
        plain = super().forward(input)  # [..., O]
        return plain + self.scale * self.lora_B(self.lora_A(input)) if self.is_on else plain

    def merge(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the weight of the plain layer that computes the same, in float32.

        Shapes: [O, I], [R, I], [O, R] -> [O, I].
        """
        return torch.addmm(weight.float(), b.float(), a.float(), alpha=self.scale)


class Adapter:
    """All adapters of one model: its adapted layers by name. Nothing else of that model is trained."""

    def __init__(self, layers: Mapping[str, LoraLinear]) -> None:
        self._layers = layers

    @classmethod
    def attach(cls, model: nn.Module, inside: Iterable[nn.Module], config: LoraConfig, seed: int) -> Self:
        """Freeze `model` and add adapters to those linear layers within the modules `inside` that the config names.

        Every rank creates the same adapters. Raises ConfigError for a name that no linear layer has.
        """
        linear = linear_layers(model, inside)
        known = {name.rpartition(".")[2] for name in linear}
        if unknown := [name for name in config.target_modules if name not in known]:
            raise ConfigError(
                f"trainer.lora.target_modules names {unknown[0]!r}, but no linear layer of the model has that "
                f"name; the names are {', '.join(sorted(known))}"
            )
        model.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        layers: dict[str, LoraLinear] = {}
        for name, layer in linear.items():
            if name.rpartition(".")[2] in config.target_modules:
                layers[name] = LoraLinear(layer, rank=config.rank, scale=config.scale, generator=generator)
                model.set_submodule(name, layers[name])
        return cls(layers)

    def parameters(self) -> dict[str, Tensor]:
        """Return the adapters' parameters by their names in the model; with several ranks, this rank's shards."""
        return {
            f"{name}.{matrix}.weight": getattr(layer, matrix).weight
            for name, layer in self._layers.items()
            for matrix in ("lora_A", "lora_B")
        }

    @contextmanager
    def off(self) -> Generator[None]:
        """Turn the adapters off: inside the context, the model computes what it did without them."""
        for layer in self._layers.values():
            layer.is_on = False
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.is_on = True

    def merged(self, name: str, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return one whole parameter of the plain model, with its adapter, if any, merged in and cast to `dtype`.

        `parameters` are those of model and adapters. Collective: every rank has to call it.
        """
        inner = name.removesuffix(".weight")
        layer = self._layers.get(inner) if name.endswith(".weight") else None
        if layer is None:
            return whole(parameters[name].detach().to(dtype))
        a, b = (whole(parameters[f"{inner}.{matrix}.weight"].detach()) for matrix in ("lora_A", "lora_B"))
        return layer.merge(whole(parameters[name].detach()), a, b).to(dtype)


def linear_layers(model: nn.Module, inside: Iterable[nn.Module]) -> dict[str, nn.Linear]:
    """Return by name the linear layers of a model that are within these parts of it."""
    within = {id(module) for part in inside for module in part.modules()}
    return {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and id(one) in within}


def halve(model: nn.Module, inside: Iterable[nn.Module], apart: dict[str, Tensor]) -> None:
    """Hold the weights of linear layers, which are frozen, in bfloat16 where that loses nothing.

    Those of most published models are. `apart` has the parameters by name that are not in the model (`set_apart`).
    """
    for name, layer in linear_layers(model, inside).items():
        exact = apart.get(f"{name}.weight", layer.weight.detach())
        half = exact.to(torch.bfloat16)
        if torch.equal(half.float(), exact):
            if f"{name}.weight" in apart:
                apart[f"{name}.weight"] = half
                half = torch.empty(half.shape, dtype=half.dtype, device="meta")
            layer.weight = nn.Parameter(half, requires_grad=False)


def recompute(layers: Sequence[nn.Module]) -> None:
    """Make layers keep only their input and recompute the rest in the backward pass (arXiv 1604.06174).

    Values and gradients stay the same, since models are in eval mode and nothing in a layer is random. Call it before
    `shard`, whose hooks must wrap this one, and after any copy is made: a copied layer would still call the original.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
