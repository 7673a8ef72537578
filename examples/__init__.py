"""Runnable examples: ``python -m examples.llama`` from the root of the repository, and so on."""
