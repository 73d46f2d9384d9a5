"""Conversations: the model speaks, tools and environments answer, exact to the token."""
