"""Stored responses of the Responses API: `store` is the way in."""
