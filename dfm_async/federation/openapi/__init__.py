"""Operations of HTTP services, from OpenAPI documents."""
