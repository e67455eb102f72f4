"""End-to-end tests: a real API server, real pods, a real model.

They need a kubeconfig and two image names, so they run against any cluster whose nodes can pull the images:

    pytest e2e --kubeconfig ~/.kube/config --images .tools/images.json

Every test has a namespace of its own under the restricted Pod Security profile; what a test needs but does not change
(the operator, one model that serves) is made once.
"""
