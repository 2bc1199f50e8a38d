"""Measures ``embrace`` beside what a user would pick instead, on an emulated cluster."""
