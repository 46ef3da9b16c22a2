"""The list for vLLM on a CPU agrees with the pins of everything else, and leaves out what must stay out."""

import re
from pathlib import Path

CONFIGS = Path(__file__).parents[3] / "configs"


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (CONFIGS / name).read_text().splitlines() if line and not line.startswith("#")]
    assert all("==" in line for line in lines)
    return {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower(): line.split("==")[1] for line in lines}


def test_no_pin_contradicts_another() -> None:
    ours, vllm = pins("constraints.txt"), pins("vllm-cpu.txt")
    assert {name: (ours[name], vllm[name]) for name in ours.keys() & vllm.keys() if ours[name] != vllm[name]} == {}


def test_what_does_not_import_beside_our_torch_stays_out() -> None:
    assert not pins("vllm-cpu.txt").keys() & {"torch", "torchvision", "torchaudio", "torchcodec", "transformers"}
    assert pins("vllm-cpu.txt")["vllm-cpu"] == "0.32.0"
