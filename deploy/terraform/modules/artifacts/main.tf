# The bucket for checkpoints, TensorBoard events and videos: private, versioned, encrypted, HTTPS only.

resource "aws_s3_bucket" "this" {
  #checkov:skip=CKV_AWS_18:access logs would need a second bucket; CloudTrail has them where an account wants them
  #checkov:skip=CKV_AWS_144:a run can be repeated; copies in a second region would double the price
  #checkov:skip=CKV2_AWS_62:nothing waits for events of this bucket
  bucket_prefix = "${var.name}-"
  force_destroy = var.force_destroy
  # The tag also orders `destroy`: where AWS refuses to delete a bucket that is not empty, the key that its objects
  # are encrypted with is not reached, and they stay readable.
  tags = merge(var.tags, { Name = var.name, Key = var.kms_key_arn })
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket                  = aws_s3_bucket.this.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_versioning" "this" {
  bucket = aws_s3_bucket.this.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    bucket_key_enabled = true

    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = var.kms_key_arn
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    id     = "old-versions"
    status = "Enabled"

    filter {
      prefix = ""
    }

    # Checkpoints that the learner dropped, and earlier states of files that grow.
    noncurrent_version_expiration {
      noncurrent_days = var.keep_old_versions_days
    }

    # A deleted object leaves a marker when its last old version has gone.
    expiration {
      expired_object_delete_marker = true
    }

    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
  }

  depends_on = [aws_s3_bucket_versioning.this]
}

data "aws_iam_policy_document" "https_only" {
  statement {
    sid       = "HttpsOnly"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.this.arn, "${aws_s3_bucket.this.arn}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "this" {
  bucket = aws_s3_bucket.this.id
  policy = data.aws_iam_policy_document.https_only.json

  depends_on = [aws_s3_bucket_public_access_block.this]
}
