# One learner, kept alive by an auto-scaling group. A replacement takes the same name in the private zone, fetches
# the run's directory from S3 and resumes.

module "node" {
  source = "../node"

  run           = var.run
  machine       = var.machine
  role          = "learner"
  host          = "learner"
  instance_type = var.instance_type
  disk_gb       = var.disk_gb
  has_policy    = true
  policy        = data.aws_iam_policy_document.this.json
}

data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}

locals {
  ec2_arn = "arn:${data.aws_partition.current.partition}:ec2:${var.run.region}:${data.aws_caller_identity.current.account_id}"
}

# An address of its own only where TensorBoard is looked at from outside.
resource "aws_eip" "this" {
  #checkov:skip=CKV2_AWS_19:the learner takes it at boot, for its auto-scaling group may replace the machine
  count = var.public ? 1 : 0

  domain = "vpc"
  tags   = merge(var.run.tags, { Name = module.node.name })
}

data "aws_iam_policy_document" "this" {
  statement {
    sid       = "ListRun"
    actions   = ["s3:ListBucket"]
    resources = [var.bucket_arn]

    condition {
      test     = "StringLike"
      variable = "s3:prefix"
      values   = ["runs/${var.run.run}/*"]
    }
  }

  statement {
    sid       = "CopyRun"
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    resources = ["${var.bucket_arn}/runs/${var.run.run}/*"]
  }

  statement {
    sid       = "EncryptCopies"
    actions   = ["kms:GenerateDataKey", "kms:Decrypt"]
    resources = [var.run.kms_key_arn]

    condition {
      test     = "StringEquals"
      variable = "kms:ViaService"
      values   = ["s3.${var.run.region}.amazonaws.com"]
    }
  }

  statement {
    #checkov:skip=CKV_AWS_111:AWS offers no resources for this action; the namespace limits it
    #checkov:skip=CKV_AWS_356:as above
    sid       = "Progress"
    actions   = ["cloudwatch:PutMetricData"]
    resources = ["*"]

    condition {
      test     = "StringEquals"
      variable = "cloudwatch:namespace"
      values   = ["Troupe"]
    }
  }

  dynamic "statement" {
    for_each = length(var.may_stop) > 0 ? [var.may_stop] : []

    content {
      sid     = "StopMachinesAtTheEnd"
      actions = ["autoscaling:SetDesiredCapacity"]
      resources = [for name in statement.value :
        "arn:${data.aws_partition.current.partition}:autoscaling:${var.run.region}:${data.aws_caller_identity.current.account_id}:autoScalingGroup:*:autoScalingGroupName/${name}"
      ]
    }
  }

  statement {
    sid     = "LetGoOfItself"
    actions = ["autoscaling:CompleteLifecycleAction"]
    resources = [
      "arn:${data.aws_partition.current.partition}:autoscaling:${var.run.region}:${data.aws_caller_identity.current.account_id}:autoScalingGroup:*:autoScalingGroupName/${module.node.name}"
    ]
  }

  dynamic "statement" {
    for_each = aws_eip.this

    content {
      sid     = "TakeOwnAddress"
      actions = ["ec2:AssociateAddress"]
      resources = [
        "${local.ec2_arn}:elastic-ip/${statement.value.allocation_id}",
        "${local.ec2_arn}:network-interface/*",
      ]
    }
  }

  dynamic "statement" {
    for_each = aws_eip.this

    content {
      sid       = "ForMachinesOfThisRun"
      actions   = ["ec2:AssociateAddress"]
      resources = ["${local.ec2_arn}:instance/*"]

      condition {
        test     = "StringEquals"
        variable = "aws:ResourceTag/Run"
        values   = [var.run.run]
      }
    }
  }
}

resource "aws_autoscaling_group" "this" {
  name                      = module.node.name
  min_size                  = 0
  max_size                  = 1
  desired_capacity          = var.running ? 1 : 0
  vpc_zone_identifier       = var.subnet_ids
  health_check_type         = "EC2"
  health_check_grace_period = 300
  wait_for_capacity_timeout = "0" # a machine without capacity today comes tomorrow, and the others wait for it

  # For an alarm; they cost nothing.
  enabled_metrics = ["GroupDesiredCapacity", "GroupInServiceInstances"]

  launch_template {
    id      = module.node.launch_template.id
    version = module.node.launch_template.version
  }

  dynamic "tag" {
    for_each = merge(var.run.tags, { Name = module.node.name, Role = "learner" })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = false # the launch template tags machines
    }
  }
}

# A group that ends the learner (a smaller group, a machine that fails, `running = false`) waits until the last
# checkpoint is in the bucket. A machine that is dead already delays its replacement by this time.
resource "aws_autoscaling_lifecycle_hook" "last_copy" {
  name                   = "last-copy"
  autoscaling_group_name = aws_autoscaling_group.this.name
  lifecycle_transition   = "autoscaling:EC2_INSTANCE_TERMINATING"
  heartbeat_timeout      = 300
  default_result         = "CONTINUE"
}
