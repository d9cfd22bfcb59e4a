"""What differs between vLLM's versions: the only code that names vLLM's modules and private parts.

`places` knows where vLLM defines what the agent hooks, `features` what needs which of it, `ranks`
its parallel configuration, `encoders` its encoder caches, `engine` and `requests` how to ask the
engine, and `responses` the Responses API. A name that no version here has
is reported, and what needs it stays off: the server then does what it does without vllmops.
"""
