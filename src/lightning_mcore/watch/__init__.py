"""Notices within seconds that a rank has died, raised or hangs, and ends all ranks with the reason.

A channel of its own (TCP, host only) carries signs of life, so it works while every main thread is
stuck in a collective. Knows neither Lightning nor the engine.
"""
