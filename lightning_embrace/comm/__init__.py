"""Carries what the schedule decides between ranks: collectives, requests, traffic counts and the control channel."""
