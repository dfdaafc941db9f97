"""Reads answers with the parsers of SGLang or vLLM, within the environment of one of them; imports nothing of ours.

Usage: PYTHON engine_parsers.py sglang|vllm < cases.json > calls.json

Given are `tools` and `cases`, each with a `format` and a `text`. Printed is a list with the calls of each case, as
pairs of a name and arguments; null where the engine has no parser for the format, or its parser fails.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Calls = list[tuple[str, Any]] | None

SGLANG = {
    "qwen_coder": "qwen3_coder_detector.Qwen3CoderDetector",
    "glm": "glm4_moe_detector.Glm4MoeDetector",
    "glm_47": "glm47_moe_detector.Glm47MoeDetector",
    "harmony": "gpt_oss_detector.GptOssDetector",
    "kimi_k2": "kimik2_detector.KimiK2Detector",
    "minimax": "minimax_m2.MinimaxM2Detector",
    "deepseek_v32": "deepseekv32_detector.DeepSeekV32Detector",
    "deepseek_v4": "deepseekv4_detector.DeepSeekV4Detector",
    "gemma_4": "gemma4_detector.Gemma4Detector",
    "llama_4": "pythonic_detector.PythonicDetector",
    "lfm_2": "lfm2_detector.Lfm2Detector",
    "hermes": "hermes_detector.HermesDetector",
    "qwen": "qwen25_detector.Qwen25Detector",
    "llama3_json": "llama32_detector.Llama32Detector",
    "mistral": "mistral_detector.MistralDetector",
    "mistral_v11": "mistral_detector.MistralDetector",
    "deepseek": "deepseekv3_detector.DeepSeekV3Detector",
    "deepseek_v31": "deepseekv31_detector.DeepSeekV31Detector",
}
VLLM = {
    "qwen_coder": "qwen3_coder",
    "glm": "glm45",
    "glm_47": "glm47",
    "kimi_k2": "kimi_k2",
    "minimax": "minimax_m2",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "gemma_4": "gemma4",
    "function_gemma": "functiongemma",
    "seed": "seed_oss",
    "llama_4": "llama4_pythonic",
    "lfm_2": "lfm2",
    "phi_4_mini": "phi4_mini_json",
    "granite_3": "granite",
    "hermes": "hermes",
    "llama3_json": "llama3_json",
    "mistral_v11": "mistral",
    "deepseek": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
}


def sglang(tools: Sequence[Any]) -> Callable[[str, str], Calls]:
    from importlib import import_module

    sys.path.insert(0, str(Path(__file__).parents[3] / "areal_agent/engine/sglang"))
    from launcher import stand_in_for_what_cpus_lack

    stand_in_for_what_cpus_lack()
    from sglang.srt.entrypoints.openai.protocol import Tool

    known = [Tool(**tool) for tool in tools]

    def read(format_: str, text: str) -> Calls:
        module, _, name = SGLANG[format_].partition(".")
        detector = getattr(import_module(f"sglang.srt.function_call.{module}"), name)()
        if format_ == "harmony":
            text = f"<|start|>assistant{text}"
        return [(call.name, json.loads(call.parameters)) for call in detector.detect_and_parse(text, known).calls]

    return read


class Vocabulary(dict[str, int]):
    """Has an id for every token that it is asked for."""

    def __missing__(self, token: str) -> int:
        self[token] = len(self)
        return self[token]

    def get(self, token: str, default: int | None = None) -> int | None:
        del default
        return self[token]

    def __contains__(self, token: object) -> bool:
        return True


class Tokenizer:
    """What the parsers ask of a tokenizer, where they read text."""

    def __init__(self) -> None:
        self.vocabulary = Vocabulary()

    def get_vocab(self) -> Vocabulary:
        return self.vocabulary

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.vocabulary[text]]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(text for one in ids for text, number in self.vocabulary.items() if number == one)

    all_special_tokens: Sequence[str] = ()
    all_special_ids: Sequence[int] = ()
    chat_template = ""


def vllm(tools: Sequence[Any]) -> Callable[[str, str], Calls]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=list(tools))

    def read(format_: str, text: str) -> Calls:
        parser = ToolParserManager.get_tool_parser(VLLM[format_])(Tokenizer(), request.tools)
        found = parser.extract_tool_calls(text, request)
        return [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]

    return read


def main() -> None:
    given = json.load(sys.stdin)
    read = {"sglang": sglang, "vllm": vllm}[sys.argv[1]](given["tools"])
    answers: list[Calls] = []
    for case in given["cases"]:
        try:
            answers.append(read(case["format"], case["text"]))
        except Exception as error:
            print(f"{case['format']}: {type(error).__name__}: {error}", file=sys.stderr)
            answers.append(None)
    print(json.dumps(answers))  # the last line; imports print, too


if __name__ == "__main__":
    main()
