# What machines of all roles share: an instance role with only the permissions that the role needs, and a launch
# template with encrypted disk, metadata version 2 only, and user data without secrets.

data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}

locals {
  name     = var.index == null ? "${var.run.name}-${var.role}" : "${var.run.name}-${var.role}-${var.index}"
  arn      = "arn:${data.aws_partition.current.partition}"
  account  = data.aws_caller_identity.current.account_id
  ssm_arn  = "${local.arn}:ssm:${var.run.region}:${local.account}:parameter${var.run.parameters}"
  log_arn  = "${local.arn}:logs:${var.run.region}:${local.account}:log-group:${var.machine.log_group}"
  dns_name = var.host == "" ? "" : "${var.host}.${var.run.domain}"

  user_data = templatefile("${path.module}/user_data.sh.tftpl", {
    run        = var.run.run
    role       = var.role
    index      = coalesce(var.index, 0)
    learner    = var.run.learner
    parameters = var.run.parameters
    region     = var.run.region
  })
}

data "aws_iam_policy_document" "assume" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "this" {
  statement {
    sid       = "RunDescription"
    actions   = ["ssm:GetParameter"]
    resources = ["${local.ssm_arn}/config"]
  }

  statement {
    sid       = "PublicKeys"
    actions   = ["ssm:GetParametersByPath"]
    resources = ["${local.ssm_arn}/keys/public"]
  }

  statement {
    sid       = "OwnSecretKey"
    actions   = ["ssm:GetParameter"]
    resources = [var.machine.secret_arn]
  }

  statement {
    sid       = "DecryptOwnSecretKey"
    actions   = ["kms:Decrypt"]
    resources = [var.run.kms_key_arn]

    condition {
      test     = "StringEquals"
      variable = "kms:EncryptionContext:PARAMETER_ARN"
      values   = [var.machine.secret_arn]
    }
  }

  statement {
    sid       = "Logs"
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
    resources = [local.log_arn, "${local.log_arn}:*"]
  }

  # Session Manager only; the managed policy would also let a machine read every parameter of the account.
  statement {
    #checkov:skip=CKV_AWS_111:AWS offers no resources for these actions
    #checkov:skip=CKV_AWS_356:as above
    sid = "SessionManager"
    actions = [
      "ssm:UpdateInstanceInformation",
      "ssmmessages:CreateControlChannel",
      "ssmmessages:CreateDataChannel",
      "ssmmessages:OpenControlChannel",
      "ssmmessages:OpenDataChannel",
    ]
    resources = ["*"]
  }

  dynamic "statement" {
    for_each = local.dns_name == "" ? [] : [local.dns_name]

    content {
      sid       = "OwnName"
      actions   = ["route53:ChangeResourceRecordSets"]
      resources = [var.run.zone_arn]

      condition {
        test     = "ForAllValues:StringEquals"
        variable = "route53:ChangeResourceRecordSetsNormalizedRecordNames"
        values   = [statement.value]
      }

      # ForAllValues also holds for a request without the key.
      condition {
        test     = "Null"
        variable = "route53:ChangeResourceRecordSetsNormalizedRecordNames"
        values   = ["false"]
      }

      condition {
        test     = "ForAllValues:StringEquals"
        variable = "route53:ChangeResourceRecordSetsRecordTypes"
        values   = ["A"]
      }

      condition {
        test     = "Null"
        variable = "route53:ChangeResourceRecordSetsRecordTypes"
        values   = ["false"]
      }
    }
  }
}

resource "aws_iam_role" "this" {
  name               = local.name
  description        = "Machines of ${local.name}"
  assume_role_policy = data.aws_iam_policy_document.assume.json
  tags               = var.run.tags
}

resource "aws_iam_role_policy" "this" {
  name   = "node"
  role   = aws_iam_role.this.id
  policy = data.aws_iam_policy_document.this.json
}

resource "aws_iam_role_policy" "own" {
  count = var.has_policy ? 1 : 0

  name   = var.role
  role   = aws_iam_role.this.id
  policy = var.policy
}

resource "aws_iam_instance_profile" "this" {
  name = local.name
  role = aws_iam_role.this.name
  tags = var.run.tags
}

resource "aws_launch_template" "this" {
  #checkov:skip=CKV_AWS_88:only in runs without a NAT gateway, or for TensorBoard; security groups admit nobody else
  name                   = local.name
  description            = "${var.role} of ${var.run.name}"
  image_id               = var.machine.image_id
  instance_type          = var.instance_type
  update_default_version = true
  ebs_optimized          = true
  user_data              = base64encode(local.user_data)

  iam_instance_profile {
    arn = aws_iam_instance_profile.this.arn
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  # Per-minute metrics of a machine cost about two dollars a month, and nothing reads them.
  monitoring {
    enabled = false
  }

  network_interfaces {
    associate_public_ip_address = var.machine.public_address
    delete_on_termination       = true
    security_groups             = [var.machine.security_group_id]
  }

  block_device_mappings {
    device_name = var.machine.root_device

    ebs {
      volume_type           = "gp3"
      volume_size           = var.disk_gb
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume"])

    content {
      resource_type = tag_specifications.value
      tags          = merge(var.run.tags, { Name = local.name, Role = var.role })
    }
  }
}
