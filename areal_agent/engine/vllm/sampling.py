"""How one completion is sampled, as vLLM's `sampling_params`. Parameters that are off are not sent.

A request ends where ours says: by its own stop tokens, never by what the model's folder calls an end. Stop texts are
not sent, here as anywhere: texts are cut by the gateway.
"""

from typing import Any

from areal_agent.engine_types import GenerateRequest
from areal_agent.types import SamplingParams

_OFF = SamplingParams()
_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}  # ours, and vLLM's


def encode_sampling(request: GenerateRequest) -> dict[str, Any]:
    """The object `sampling_params`.

    >>> request = GenerateRequest(request_id="r1", input_ids=(5,), sampling=SamplingParams(max_tokens=7))
    >>> encode_sampling(request)["max_tokens"]
    7
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(0, sampling.top_k),  # 0 is off
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": _num_logprobs(request),
    }
    for name in ("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        if getattr(sampling, name) != getattr(_OFF, name):
            params[name] = getattr(sampling, name)
    if sampling.logit_bias:
        params["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    if sampling.grammar is not None:
        name, text = sampling.grammar
        params["structured_outputs"] = {_GRAMMARS[name]: text}
    return params


def _num_logprobs(request: GenerateRequest) -> int:
    """One more than is asked for: the sampled token takes a place among them, likely or not."""
    return request.num_top_logprobs + 1 if request.num_top_logprobs else 0
