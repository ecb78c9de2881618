"""Which points there are, and which result is best. Pure: it knows neither Ray nor MLflow."""
