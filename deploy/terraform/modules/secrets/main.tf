# The run's encryption key and its CURVE keys. A secret key goes from its file to the parameter store through a
# write-only argument: neither the plan nor the state ever holds it.

data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}

locals {
  account = "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:root"
  # What every machine may read: the servers' public keys, and who may connect to them.
  public = ["learner.public", "replay.public", "allowed"]
}

data "aws_iam_policy_document" "key" {
  #checkov:skip=CKV_AWS_109:the account's own IAM policies decide; this is AWS's default key policy
  #checkov:skip=CKV_AWS_111:as above
  #checkov:skip=CKV_AWS_356:in a key policy "*" means this key
  statement {
    sid       = "AccountDecides"
    actions   = ["kms:*"]
    resources = ["*"]

    principals {
      type        = "AWS"
      identifiers = [local.account]
    }
  }

  statement {
    sid       = "Logs"
    actions   = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"]
    resources = ["*"]

    principals {
      type        = "Service"
      identifiers = ["logs.${var.region}.amazonaws.com"]
    }

    condition {
      test     = "ArnLike"
      variable = "kms:EncryptionContext:aws:logs:arn"
      values   = ["arn:${data.aws_partition.current.partition}:logs:${var.region}:${data.aws_caller_identity.current.account_id}:log-group:${var.parameters}/*"]
    }
  }

  statement {
    sid       = "Alarms"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey*"]
    resources = ["*"]

    principals {
      type        = "Service"
      identifiers = ["cloudwatch.amazonaws.com", "budgets.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.current.account_id]
    }
  }
}

resource "aws_kms_key" "this" {
  description             = "Keys, checkpoints and logs of ${var.name}"
  enable_key_rotation     = true
  deletion_window_in_days = 7
  policy                  = data.aws_iam_policy_document.key.json
  tags                    = merge(var.tags, { Name = var.name })
}

resource "aws_kms_alias" "this" {
  name          = "alias/${var.name}"
  target_key_id = aws_kms_key.this.key_id
}

# In base64: a key may hold two braces in a row, which the parameter store refuses.
resource "aws_ssm_parameter" "secret" {
  for_each = var.roles

  name        = "${var.parameters}/keys/secret/${each.key}"
  description = "Secret CURVE key of the ${each.key}, base64"
  type        = "SecureString"
  key_id      = aws_kms_key.this.arn
  value_wo    = filebase64("${var.keys_dir}/${each.key}.secret")
  # A new pair is a new version. Derived from the public half: Terraform stores this number.
  value_wo_version = parseint(substr(filesha256("${var.keys_dir}/${each.key}.public"), 0, 7), 16)
  tags             = var.tags
}

resource "aws_ssm_parameter" "public" {
  #checkov:skip=CKV2_AWS_34:public keys are public
  #checkov:skip=CKV_AWS_337:public keys are public
  for_each = toset(local.public)

  name        = "${var.parameters}/keys/public/${each.key}"
  description = "Public CURVE keys, base64"
  type        = "String"
  value       = filebase64("${var.keys_dir}/${each.key}")
  tags        = var.tags
}
