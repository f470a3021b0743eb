"""Prediction of launches, bytes and time from shapes; nothing runs."""
