"""Responses that go on without their client: their runs, their events, and running them again."""
