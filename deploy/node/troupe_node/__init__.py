"""What a cloud machine does besides the services: boot, copies to S3, spot notices.

Environment (`/etc/troupe/node.env`, written by user data):
    TROUPE_RUN, TROUPE_ROLE, TROUPE_LEARNER, TROUPE_PARAMETERS (path in the parameter store), AWS_REGION, and
    for a replay shard TROUPE_INDEX.
    AWS_ENDPOINT_URL and AWS_EC2_METADATA_SERVICE_ENDPOINT, AWS's own variables, lead elsewhere in tests.
"""
