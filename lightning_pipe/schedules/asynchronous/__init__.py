"""Schedules without a flush."""
