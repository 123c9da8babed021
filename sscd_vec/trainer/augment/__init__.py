"""Edited views of images: ``recipe`` and ``choices`` decide, ``views`` applies, the rest edits."""
