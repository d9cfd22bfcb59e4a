"""Takes secrets, and what users and models said, out of text that leaves the machine.

It reads no file and asks no server: text in, text out.
"""
