"""A small, from-scratch library for speculative decoding. Import its modules by name; this file imports nothing."""
