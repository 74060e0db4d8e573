"""The glue between Lightning and the engine. Nothing else imports Lightning."""
