"""The agent's logger."""

import logging

# Below "vllm", so that vLLM's own handlers print it.
log = logging.getLogger("vllm.vllmops")
