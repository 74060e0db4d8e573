"""The first command of each recipe's page, run with several seeds: figures, pictures and samples for that page."""
