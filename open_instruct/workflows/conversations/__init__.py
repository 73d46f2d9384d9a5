"""Conversations: the model speaks, tools and environments answer, and every token is kept exactly as it was sampled."""
