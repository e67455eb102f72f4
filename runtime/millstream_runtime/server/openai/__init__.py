"""The OpenAI API: requests, sampling parameters, generations, responses."""
