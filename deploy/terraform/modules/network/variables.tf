variable "name" {
  description = "Prefix of names."
  type        = string
}

variable "region" {
  description = "Region of the VPC."
  type        = string
}

variable "cidr" {
  description = "Addresses of the VPC; a prefix of 16 to 22 bits leaves room for the subnets."
  type        = string

  validation {
    condition     = can(cidrhost(var.cidr, 0)) && try(tonumber(split("/", var.cidr)[1]) >= 16 && tonumber(split("/", var.cidr)[1]) <= 22, false)
    error_message = "cidr should be an IPv4 block with a prefix of 16 to 22 bits, such as 10.20.0.0/16."
  }
}

variable "availability_zones" {
  description = "Zones that get subnets, 1 to 8."
  type        = list(string)

  validation {
    condition     = length(var.availability_zones) >= 1 && length(var.availability_zones) <= 8
    error_message = "availability_zones should name 1 to 8 zones."
  }
}

variable "nat_gateway" {
  description = "Private subnets behind a NAT gateway; false: public subnets whose security groups admit no connections."
  type        = bool
}

variable "domain" {
  description = "Name of the private DNS zone."
  type        = string
}

variable "flow_logs" {
  description = "Log group and role for refused connections; null: none."
  type = object({
    log_group_arn = string
    role_arn      = string
  })
  default = null
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
}
