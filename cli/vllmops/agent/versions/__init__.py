"""What differs between vLLM's versions: the only code that names vLLM's modules and private parts.

`module_locations` knows where vLLM defines what the agent hooks, `features` what needs which of it,
`ranks` its parallel configuration, `encoder_caches` its encoder caches, `engine` and `requests` how
to ask the engine. A name that no version here has is reported, and what needs it stays off: the
server then does what it does without vllmops.
"""
