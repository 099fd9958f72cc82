"""What models cost, for people and programs: configurations by name, tables, pictures and JSON."""
