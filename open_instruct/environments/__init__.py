"""Tools and environments that a conversation's model acts on, each in a process of its own."""
