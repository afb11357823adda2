"""Recipes: `default` holds every knob, each other file only what differs."""
