"""What a network costs: bytes and operations, computed and measured."""
