"""Other people's files: configurations of published models, and what they mean for position."""
