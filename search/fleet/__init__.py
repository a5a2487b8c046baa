"""Searches that share a database: one side asks for measurements, workers on devices take them.

Only these modules talk to a database. Nothing here is loaded unless ``--storage`` is given.
"""
