"""The config section of the algorithm: a preset and its overrides, and the user's own functions. Imports no torch."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import Field, field_validator, model_validator

from areal_agent.errors import ConfigError
from areal_agent.section import Section, import_object, is_import_path

Preset = Literal["grpo", "rloo", "ppo", "gspo", "cispo", "dapo"]
Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "gae"]
Loss = Literal["ppo_clip", "gspo", "cispo"]

PRESETS: Mapping[str, Mapping[str, object]] = {
    "grpo": {},
    "rloo": {"advantage": "rloo"},
    "ppo": {"advantage": "gae", "critic": True},
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4, "minibatches": 4},
    "cispo": {"loss": "cispo", "proximal": "behavior", "clip_low": 1.0, "clip_high": 4.0},
    "dapo": {
        "clip_high": 0.28,
        "dynamic_sampling": True,
        "minibatches": 4,
        "reward_parts": {"overlong": 1.0},
    },
}
"""The choices of each preset in place of AlgorithmConfig's defaults. Keys that the user sets override them."""

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo")
BATCH_ADVANTAGES = ("reinforce_pp", "gae")
OVERLONG, LENGTH = "overlong", "length"
"""Reward parts that are computed."""
REWARD_KEYS = ("advantage", "normalize_by_std", "whiten", "step_group_weight", "discount", "critic", "kl_in")
"""The keys of an algorithm that count only where advantages come from rewards."""
RENAMED = {"behavior_weight_cap": "behavior_weight_high"}
"""Keys of the stored configs of earlier runs, and their names today."""
ARGUMENTS = {"advantage": ("records", "rewards", "config"), "loss": ("tokens", "config")}
"""What a user's own functions are called with."""


class TeacherConfig(Section):
    """On-policy distillation: a second model says how likely it finds each token that the policy sampled.

    The advantage of a token is log p_teacher - log p_student, whose gradient is that of the reverse KL divergence. See
    docs/distillation.md.
    """

    model: Annotated[str, Field(min_length=1)] | None = None
    """The teacher's Hugging Face folder or hub name, which the trainer loads beside the policy. Its tokenizer must be
    the policy's. With `url`, only its tokenizer is read."""
    url: Annotated[str, Field(pattern=r"^https?://[^/]+")] | None = None
    """A running server that has the teacher instead: areal_agent's own, SGLang's or vLLM's. Without `model` too, the
    folder that it serves has to be readable here, so that the tokenizers can be compared."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the teacher's part of the advantage."""
    reward_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the advantage by rewards (`algorithm.advantage`). 0: the teacher alone; rewards are only measured.
    Above 0: each part is normalised by itself and then weighted, rewards as `algorithm.advantage` does it, and the
    teacher's part by its root mean square over the batch."""
    wait_s: Annotated[float, Field(gt=0)] = 600.0
    """With `url`: how long a train step waits for a server that does not answer before the run ends, to be resumed."""

    @property
    def is_alone(self) -> bool:
        """Return whether rewards have no part in the advantages."""
        return self.reward_weight == 0.0

    @model_validator(mode="after")
    def _is_somewhere(self) -> Self:
        if self.model is None and self.url is None:
            raise ValueError("the section has neither model nor url; give the teacher's folder or its server")
        if self.url is None and self.wait_s != type(self).model_fields["wait_s"].default:
            raise ValueError("wait_s only applies to a teacher with url; leave it out")
        return self


class AlgorithmConfig(Section):
    """The algorithm that turns rewards into gradients. In YAML a bare preset name means `{preset: NAME}`.

    >>> AlgorithmConfig(preset="rloo").divides_by_std
    False
    >>> AlgorithmConfig(preset="ppo").whitens
    True
    >>> AlgorithmConfig(preset="dapo", clip_low=0.1).clip_high
    0.28
    """

    preset: Preset = "grpo"
    """A set of choices for the keys below; keys that are set override it. `grpo`: the defaults. `rloo`: advantage rloo.
    `ppo`: advantage gae with a critic. `gspo`: loss gspo, sequence_mean, clips 0.0003 and 0.0004, 4 minibatches.
    `cispo`: loss cispo, proximal behavior, clips 1 (none below) and 4. `dapo`: clip_high 0.28, dynamic_sampling, 4
    minibatches, and `reward_parts: {overlong: 1}`, which parts of your own replace."""
    advantage: str = "grpo"
    """`grpo`: return minus the group's mean at that turn. `dr_grpo`: the same, never divided. `rloo`: minus the mean of
    the others. `reinforce_pp`: the return alone. `gae`: by a critic. Or the user's own function,
    `package.module:function`, as in `examples/custom_loss/`."""
    normalize_by_std: bool | None = None
    """Divide advantages by the standard deviation of their group's rewards (grpo and rloo). The default follows the
    papers: yes for grpo."""
    whiten: bool | None = None
    """Subtract from all advantages of a train step their mean, and divide by their standard deviation. The default
    follows the papers: yes for reinforce_pp and gae. With dr_grpo that is REINFORCE++ with a group baseline."""
    dynamic_sampling: bool = False
    """Drop groups whose advantages are all zero because all their rollouts earn the same from every turn on, and roll
    out other tasks instead. Only rollouts with a token to train count."""
    step_group_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a second advantage (GiGPO) that compares turns of a group which saw the same observation."""
    loss: str = "ppo_clip"
    """`ppo_clip`, `gspo` (one ratio a sequence) or `cispo` (clips weights, never gradients). Or the user's own
    function, `package.module:function`, as in `examples/custom_loss/`."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio to the proximal policy is clipped below 1 - clip_low; 1 clips nothing."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio to the proximal policy is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Tokens with a negative advantage are also clipped above this ratio (ppo_clip only)."""
    proximal: Literal["recompute", "approximate", "behavior"] = "recompute"
    """The policy in the ratio's denominator. `recompute`: the trainer's at the start of the step. `approximate`: the
    same, estimated from the token's age without a forward pass. `behavior`: the policy that sampled the token, as in
    PPO without decoupling."""
    behavior_weight_level: Literal["token", "sequence", "geometric", "none"] = "token"
    """The level of the importance weight, proximal over behaviour probability. `token`: each token has its own.
    `sequence`: the product over a sequence's tokens, for all of them. `geometric`: their geometric mean. `none`: it is
    1; only with `max_staleness: 0`, where engine and trainer have the same weights. Two runs of one seed then end with
    identical weights, because the loss reads nothing that depends on what else an engine computed."""
    behavior_weight_mode: Literal["truncate", "mask"] = "truncate"
    """A weight outside its bounds becomes the bound (`truncate`, as in TIS), or its tokens leave the policy's loss
    (`mask`, as in IcePop and MIS)."""
    behavior_weight_low: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The lower bound of the importance weight; 0 bounds nothing."""
    behavior_weight_high: Annotated[float, Field(ge=1)] = 5.0
    """The upper bound of the importance weight, and of the ratio that weights the divergence in the loss."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """The weight of one token over a whole optimiser update. `token_mean`: every token counts the same.
    `sequence_mean`: every rollout counts the same. `constant`: 1 / (rollouts * aggregation_tokens)."""
    aggregation_tokens: Annotated[int, Field(ge=1)] | None = None
    """The divisor of `aggregation: constant`, for example the most tokens that a rollout may have."""
    minibatches: Annotated[int, Field(ge=1)] = 1
    """Optimiser updates in a train step, each on its own share of the rollouts."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of rewards from turn to turn; tokens within a turn, and observations, are not discounted."""
    reward_parts: dict[str, float] = Field(default_factory=dict[str, float])
    """Weights of named reward parts: weight times part is added to a rollout's final reward. Parts that a workflow does
    not name itself: `overlong`, DAPO's soft punishment, falls from 0 to -1 over the last tokens before the limit of the
    rollout's longest answer, for its limit; `length` is the number of sampled tokens in thousands (its weight is
    negative)."""
    overlong_buffer: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The share of an answer's token limit over which reward part `overlong` falls."""
    truncated: Literal["train", "mask"] = "train"
    """Conversations whose last answer was cut off by its token limit: `train` them as others, or `mask` them out of the
    loss. Their rewards count in the baseline of their group either way."""
    critic: bool = False
    """Train a critic, for advantage gae: the policy's architecture with one output."""
    critic_learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of the critic's optimiser; by default `trainer.learning_rate`. Other settings are the trainer's."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda of gae, from loss token to loss token."""
    value_clip: Annotated[float, Field(gt=0)] = 0.2
    """How far a value may move from its value at the start of the step before the critic's loss is clipped."""
    reference: Literal["none", "initial"] = "none"
    """`initial`: keep a frozen copy of the weights that the run began with, and measure the divergence from it."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the divergence KL(policy || reference) is applied. `loss`: added, with exactly its gradient. `reward`:
    subtracted from each token's reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The estimate in the reward. k1: -log x, k2: (log x)^2 / 2, k3: x - 1 - log x, where x is the reference's
    probability over the policy's. In the loss its gradient does not depend on the estimate, and k3 is shown."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    teacher: TeacherConfig | None = None
    """Learn from a teacher on the policy's own answers. Without this section there is none."""

    @property
    def divides_by_std(self) -> bool:
        """The value of `normalize_by_std`, or the advantage's own default."""
        return self.advantage == "grpo" if self.normalize_by_std is None else self.normalize_by_std

    @property
    def whitens(self) -> bool:
        """The value of `whiten`, or the advantage's own default."""
        return self.advantage in BATCH_ADVANTAGES if self.whiten is None else self.whiten

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        given = {RENAMED.get(name, name): value for name, value in cast(Mapping[str, object], values).items()}
        return {**PRESETS.get(str(given.get("preset", "grpo")), {}), **given}

    @field_validator("advantage", "loss", mode="after")
    @classmethod
    def _is_known_or_imported(cls, value: str, info: Any) -> str:
        names: tuple[str, ...] = get_args(Advantage if info.field_name == "advantage" else Loss)
        if value not in names and not is_import_path(value):
            raise ValueError(f"is {value!r}; give one of {', '.join(names)}, or 'package.module:function'")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if faults := [reason for is_wrong, reason in self._faults() if is_wrong]:
            raise ValueError(faults[0])
        return self

    def _faults(self) -> tuple[tuple[bool, str], ...]:
        return (*self._faults_with_a_teacher(), *self._faults_of_keys())

    def _faults_with_a_teacher(self) -> tuple[tuple[bool, str], ...]:
        """Rewards that are not used, or not normalised before the teacher's part is added to them."""
        if self.teacher is None:
            return ()
        given = {name: getattr(self, name) for name in REWARD_KEYS}
        idle = [name for name, value in given.items() if value != type(self).model_fields[name].default]
        return (
            (
                self.dynamic_sampling,
                "dynamic_sampling drops groups from which a teacher would teach; set it to false",
            ),
            (
                self.teacher.is_alone and bool(idle),
                f"{', '.join(idle)} has no effect without rewards, and teacher.reward_weight is 0; leave it out (a "
                "preset may set it), or raise teacher.reward_weight",
            ),
            (
                not (self.teacher.is_alone or self.divides_by_std or self.whitens or is_import_path(self.advantage)),
                f"teacher.reward_weight is {self.teacher.reward_weight:g}, and advantage {self.advantage!r} is not "
                "normalised, so rewards of another scale would weigh differently; set normalize_by_std or whiten to "
                "true",
            ),
        )

    def _faults_of_keys(self) -> tuple[tuple[bool, str], ...]:
        is_gae = self.advantage == "gae"
        is_constant = self.aggregation == "constant"
        is_penalised = self.kl_coefficient > 0
        is_bounded = self.behavior_weight_mode != "truncate" or self.behavior_weight_low > 0
        return (
            (is_gae and not self.critic, "advantage gae needs values: set critic to true, or preset to ppo"),
            (
                self.critic and not is_gae,
                f"critic is true, but advantage {self.advantage!r} reads no values: set critic to false",
            ),
            (not is_gae and self.gae_lambda != 1.0, f"gae_lambda has no effect on advantage {self.advantage!r}"),
            (
                not self.critic and (self.value_clip != 0.2 or self.critic_learning_rate is not None),
                "value_clip and critic_learning_rate have no effect without a critic",
            ),
            (
                self.advantage == "dr_grpo" and self.normalize_by_std is True,
                "advantage dr_grpo is never divided by a deviation: with normalize_by_std that is advantage grpo",
            ),
            (
                self.normalize_by_std is not None and self.advantage in BATCH_ADVANTAGES,
                f"normalize_by_std divides by the deviation of a group, and advantage {self.advantage!r} has none: "
                "set it to null; whether the batch is normalised is said by whiten",
            ),
            (
                self.dynamic_sampling and self.advantage in BATCH_ADVANTAGES,
                f"dynamic_sampling drops groups from which advantage {self.advantage!r} would learn; it is for "
                f"{', '.join(GROUP_ADVANTAGES)}",
            ),
            (
                self.step_group_weight > 0 and self.advantage not in GROUP_ADVANTAGES,
                f"step_group_weight has no effect on advantage {self.advantage!r}; it is for "
                f"{', '.join(GROUP_ADVANTAGES)}",
            ),
            (
                self.dual_clip is not None and self.loss != "ppo_clip",
                f"dual_clip has no effect on loss {self.loss!r}; it is for ppo_clip",
            ),
            (
                self.proximal == "approximate" and self.minibatches == 1,
                "proximal approximate is for minibatches > 1: with one, recompute costs nothing and is exact",
            ),
            (
                self.proximal == "behavior" and (is_bounded or self.behavior_weight_level != "token"),
                "behavior_weight_level, behavior_weight_mode and behavior_weight_low have no effect with proximal "
                "behavior: that weight is 1",
            ),
            (
                self.behavior_weight_level == "none" and is_bounded,
                "behavior_weight_mode and behavior_weight_low have no effect with behavior_weight_level none: that "
                "weight is 1",
            ),
            (
                self.overlong_buffer != 0.2 and OVERLONG not in self.reward_parts,
                "overlong_buffer has no effect without a weight for overlong in reward_parts",
            ),
            (is_constant and self.aggregation_tokens is None, "aggregation constant needs aggregation_tokens"),
            (
                self.aggregation_tokens is not None and not is_constant,
                f"aggregation_tokens has no effect on aggregation {self.aggregation!r}; it is for constant",
            ),
            (
                is_penalised and self.reference == "none",
                "kl_coefficient needs a reference to diverge from: set reference to initial",
            ),
            (
                not is_penalised and (self.kl_in != "loss" or self.kl_estimator != "k3"),
                "kl_in and kl_estimator have no effect without kl_coefficient",
            ),
            (
                self.kl_in == "loss" and self.kl_estimator != "k3",
                f"kl_estimator {self.kl_estimator} has no effect in the loss, whose gradient is the divergence's own: "
                "leave it out, or set kl_in to reward",
            ),
            (
                is_penalised and self.kl_in == "reward" and is_import_path(self.advantage),
                f"kl_in reward does not reach the advantage function {self.advantage!r}: use kl_in loss",
            ),
        )


def before_preset(values: Mapping[str, object], preset: str) -> dict[str, object]:
    """Return a section without the keys that only repeat its present preset, so that another preset can take effect.

    A run's stored config has every key; they would override all choices of the new preset.

    >>> before_preset({"preset": "rloo", "advantage": "rloo", "clip_low": 0.1}, "gspo")
    {'preset': 'rloo', 'clip_low': 0.1}
    """
    present = PRESETS.get(str(values.get("preset", "grpo")), {})
    chosen = {**present, **PRESETS.get(preset, {})}.keys()
    fields = AlgorithmConfig.model_fields
    repeated = {name: present.get(name, fields[name].get_default(call_default_factory=True)) for name in chosen}
    return {name: value for name, value in values.items() if name not in repeated or value != repeated[name]}


def load_own(config: AlgorithmConfig, choice: Literal["advantage", "loss"]) -> Callable[..., Any] | None:
    """Import the user's function that `algorithm.advantage` or `algorithm.loss` names; None for a built-in one.

    Raises ConfigError.
    """
    path, arguments = getattr(config, choice), ARGUMENTS[choice]
    if not is_import_path(path):
        return None
    found = import_object(path, f"algorithm.{choice}")
    if not callable(found):
        raise ConfigError(f"algorithm.{choice}: {path!r} is a {type(found).__name__}; give a function")
    with contextlib.suppress(ValueError):  # some functions written in C have no signature
        try:
            inspect.signature(found).bind(*arguments)
        except TypeError:
            raise ConfigError(
                f"algorithm.{choice}: {path!r} cannot be called with ({', '.join(arguments)}); make it accept these"
            ) from None
    return found
