"""Collectors: real acceptance in vLLM, and teacher-forced overlap. Heavy packages are imported when used."""
