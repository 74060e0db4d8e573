"""Training recipes: plain models and data configured by Hydra. Nothing in here knows how a pipeline works."""
