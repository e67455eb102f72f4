"""End-to-end tests: a real API server, real pods, a real model.

They need a kubeconfig and two image names, so they run against any cluster whose nodes can pull the images:

    pytest e2e --kubeconfig FILE --images .tools/images.json      all in one process
    pytest e2e … --lane own --numprocesses 2                      those that touch only their own namespace …
    pytest e2e … --lane alone                                     … and the others

They replace the cluster's Millstream and its CRD, so they refuse a cluster without the marker that `make cluster-up`
writes; the refusal says how to allow another one.

Every test has a namespace of its own under the restricted Pod Security profile; what a test needs but does not change
(the operator, one model that serves) is made once.
"""
