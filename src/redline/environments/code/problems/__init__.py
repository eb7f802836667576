"""Programming problems that need no download: families of questions with parameters, a reference solution and inputs."""
