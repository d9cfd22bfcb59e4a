"""Commands on stored responses, conversations and their keys."""
