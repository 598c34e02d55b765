"""What every layer may use: small asyncio utilities that know nothing of federations."""
