"""The model of expected time: launches and bytes counted from shapes, and times from rates; nothing runs."""
