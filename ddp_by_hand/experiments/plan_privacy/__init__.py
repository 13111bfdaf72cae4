"""Plans a private training by a scaling law: read `law`, `plan`, then `calibrate`."""
